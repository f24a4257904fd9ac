"""From signals to a decision: what failed, who is its root, what helps. Pure.

Never does: I/O, threads, clocks, torch. Called by: agent, cli, and the simulator.
"""
