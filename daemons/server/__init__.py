"""The parameter server process: owns one shard; numpy, never torch."""
