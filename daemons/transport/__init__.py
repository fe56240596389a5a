"""ZeroMQ and shared memory: how messages get from process to process."""
