"""SEED: inference and training in one process on the accelerator, environments in theirs.

python -m programs.seed --env=gymnasium:CartPole-v1 --logdir=runs/cartpole
"""

import launchpad as lp

from programs import experiment as experiment_lib
from seedlib import nodes


def seed(experiment: experiment_lib.Experiment) -> lp.Program:
    """Returns the graph."""
    queue = experiment.queue()
    learner = experiment.learner(queue)
    inference = experiment.inference(learner, queue)

    program = lp.Program("seed")
    with program.group("learner"):
        program.add_node(nodes.colocate(queue, learner, inference))
    with program.group("actor"):
        for index in range(experiment.num_actors):
            program.add_node(experiment.actor(inference, index))
    if experiment.num_evaluators:
        with program.group("evaluator"):
            for index in range(experiment.num_evaluators):
                program.add_node(experiment.evaluator(inference, index))
    return program


if __name__ == "__main__":
    experiment_lib.main("seed", seed)
