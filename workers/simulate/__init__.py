"""`gyre simulate`: workloads, fits, traces, tables and timelines around `workflows.simulation.simulator`."""
