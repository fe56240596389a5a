"""The batches of a worker: from a dataset, a stream, or the data of clients."""
