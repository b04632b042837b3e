"""The worker's adapter manager: host memory with a budget, slots, staging, and what leaves first."""
