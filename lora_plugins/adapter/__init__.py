"""Reads and verifies a LoRA adapter as PEFT saves adapters, without torch and before any engine sees the adapter."""
