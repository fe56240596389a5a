"""The template: a process of each host that has imported what workers import, and forks them."""
