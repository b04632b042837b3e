"""The worker's half: it carries out what the scheduler plans, and reports; it decides nothing."""
