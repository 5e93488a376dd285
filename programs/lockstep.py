"""Lock-step: everything in one process and one thread; two runs with one seed are the same.

python -m programs.lockstep --env=catch --num_steps=20000 --logdir=runs/catch-lockstep
"""

import launchpad as lp

from programs import experiment as experiment_lib
from seedlib import nodes


def lockstep(experiment: experiment_lib.Experiment) -> lp.Program:
    """Returns the graph. An evaluator needs a thread of its own, so there is none."""
    if experiment.num_evaluators:
        raise ValueError(f"num_evaluators must be 0 in lock-step, got {experiment.num_evaluators}")
    queue = experiment.queue()
    learner = experiment.learner(queue)
    inference = experiment.inference(learner, queue)
    actors = [experiment.actor(inference, index) for index in range(experiment.num_actors)]

    program = lp.Program("lockstep")
    with program.group("learner"):
        program.add_node(nodes.lockstep(queue, learner, inference, *actors))
    return program


if __name__ == "__main__":
    experiment_lib.main("lockstep", lockstep)
