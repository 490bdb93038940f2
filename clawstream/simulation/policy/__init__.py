"""The tiny policy that simulates a large one, and how it is built."""
