"""The autotuner: measures schedules, remembers every trial, and chooses.

trial       one candidate's record; database: all of them, append-only
candidates  what is worth trying, in the model's order; build: compiled side by side, before the GPU is touched
worker      a process per GPU, which may crash or hang; serve: what runs in it; lease: which GPU is free
measure     in that process: arrays, timing; bits: the interpreter's results, compared before anything is timed
job         one spec at one number of rows, from candidates to a choice; choose: ties within noise
tuner       all jobs, on any executor; lock: the file of chosen schedules
export      the formats of other tuners; plot: all trials of a job
"""
