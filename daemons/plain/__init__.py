"""The same job without dlctl's roles, to compare with: one plain torch process, or torch's DDP."""
