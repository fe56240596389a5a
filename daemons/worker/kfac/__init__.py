"""K-FAC in torch: the layers of a model, what they are given, and their factors."""
