"""Starting the processes of a job on this host, through Horovod's own launcher.

    run.py         what `tfdist run` does: options -> plan -> supervise -> exit code
    spawn.py       the same for a Python function: results by rank
    plan.py        options -> command line and environment (pure)
    supervise.py   watches the ranks from outside: output, failures, signals, deadline
      horovodrun.py  process: Horovod's launcher, without loading TensorFlow
        rank.py        process, one per rank: binds cores, runs the program, reports how it ended
          program.py     process, one per rank: the user's script, module or function
    rundir.py      the directory through which these processes talk (named pipes and records)
    output.py      merges the ranks' output (pure)
    verdict.py     which rank failed first, and how to say it (pure)

The program runs in a process of its own below `rank.py`, so a rank that is killed, that aborts in
C++ or that hangs in its last moments is still reported by somebody who is alive.
"""
