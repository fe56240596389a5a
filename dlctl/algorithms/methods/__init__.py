"""The methods: one file each, with its sides for worker, server and coordinator."""
