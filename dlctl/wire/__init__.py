"""What processes say to each other: the messages, their bytes, and the contract of a machine that
takes them."""
