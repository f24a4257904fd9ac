"""The node's memory: slots, background persistence, recovery planning. Never loads torch."""
