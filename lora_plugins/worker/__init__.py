"""The worker's half: the worker carries out the scheduler's plan, and reports; the worker decides nothing."""
