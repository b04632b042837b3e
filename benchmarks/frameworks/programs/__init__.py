"""Programs that run beside a framework's packages (`testbed.frameworks.packages`), each in a process of its own."""
