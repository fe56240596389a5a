"""A model's tensors: as one vector, as entries of a layout, in groups; those that are frozen."""
