"""What commands do: they return values and raise errors, and print nothing.

What is said meanwhile goes through `dlctl.util.notes`.
"""
