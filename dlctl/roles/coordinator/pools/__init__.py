"""The supplies of data: which portions there are, who has them, and which are done."""
