"""A soak: hundreds of adapters that change while they are asked for, and invariants that are checked all the time."""
