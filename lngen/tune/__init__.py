"""The autotuner: measures schedules, records every trial, and chooses.

trial       one candidate's record; database: all records, append-only
candidates  schedules to try, in the model's order; build: compiles them side by side, without the GPU
worker      a process per GPU, which may crash or hang; serve: the code that runs in it
lease       locks of free GPUs; pool: the workers of a run, kept from job to job
measure     in that process: arrays, timing; bits: the interpreter's results, compared before anything is timed
job         one spec at one number of rows, from candidates to a choice; choose: ties within noise
tuner       all jobs, on any executor; lock: the file of chosen schedules
export      the formats of other tuners; plot: all trials of a job; report: tables and JSON

From Python, on any executor whose workers have a GPU:

    jobs = [Job(parse_spec("layernorm.bwd:d=4096,dtype=bf16"), rows) for rows in (4096, 16384)]
    report = tune(jobs, Path("trials.jsonl"), executor=Client("tcp://host:8786").get_executor())
    lock.store(Path("lngen.lock.toml"), report.outcomes)
"""
