"""The methods: one file each, with the sides that worker, server and coordinator play in it."""
