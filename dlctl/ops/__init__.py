"""What commands do: they return values and raise errors, and print nothing.

Progress messages go through `dlctl.util.notes`.
"""
