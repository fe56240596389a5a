"""What a run puts on record, as values: checkpoints' manifests, evaluations, series, the memory of
its coordinator. `dlctl/runs` has the files."""
