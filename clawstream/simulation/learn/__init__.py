"""The grids, controls and reports of `clawstream learn`."""
