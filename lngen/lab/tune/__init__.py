"""The autotuner: measures schedules, records every trial, and chooses.

trials        one candidate's record, and the database: all records, append-only
candidates    schedules to try, in the model's order, compiled side by side without the GPU
workers       a process per leased GPU, which may crash or hang, kept from job to job
measure       in that process: expected bits, compared before anything is timed, and times
job           one spec at one number of rows, from candidates to a choice; ties within noise
tuner         all jobs, on any executor; the lock file of their choices
views         a run as a table and JSON, a job as a picture and in the formats of other tuners
device_table  a GPU's fastest schedules, from recorded times: what is taken without tuning
recorded      recorded times, and how good the choices of table and model are on them

From Python, on any executor whose workers have a GPU:

    jobs = [Job(parse_spec("layernorm.bwd:d=4096,dtype=bf16"), rows) for rows in (4096, 16384)]
    report = tune(jobs, Path("trials.jsonl"), executor=Client("tcp://host:8786").get_executor())
    store_choices(Path("lngen.lock.toml"), report.outcomes)
"""
