"""Starting the processes of a job on this host: ranks by Horovod's own launcher, or tasks.

    run.py         what `tfdist run` does: options -> plan -> supervise -> exit code
    spawn.py       the same for a Python function: results by rank
    plan.py        options -> command line and environment (pure)
    task_plan.py   the same for a parameter-server job (pure); ports.py finds its ports
    supervise.py   watches the ranks from outside: output, failures, signals, deadline
      horovodrun.py  process: Horovod's launcher, without loading TensorFlow
      tasks.py       process in its place for a parameter-server job: starts one rank.py a task
        rank.py        process, one per rank: binds cores, runs the program, reports how it ended
          program.py     process, one per rank: the user's script, module or function
    ending.py      when a run's processes are to be stopped and killed (pure)
    rundir.py      the directory through which these processes talk (named pipes and records)
    place.py       which of a job's processes one is (pure)
    output.py      merges the ranks' output (pure)
    outcome.py     how the run ended, for run.py and spawn.py
    verdict.py     which rank or task failed first, and how to say it (pure)

The program runs in a process of its own below `rank.py`, so a rank that is killed, that aborts in
C++ or that hangs in its last moments is still reported by somebody who is alive.
"""
