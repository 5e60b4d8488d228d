"""The lab: schedules measured, norms timed beside their peers, kernels explained and inspected."""
