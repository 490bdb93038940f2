"""Models cut over processes: real ones, on the CPU."""
