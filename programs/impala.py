"""IMPALA: inference beside each actor; parameters go to the actors, unrolls to the learner.

python -m programs.impala --env=gymnasium:CartPole-v1 --logdir=runs/cartpole-impala
"""

import launchpad as lp

from programs import experiment as experiment_lib
from seedlib import nodes


def impala(experiment: experiment_lib.Experiment) -> lp.Program:
    """Returns the graph."""
    queue = experiment.queue()
    learner = experiment.learner(queue)

    program = lp.Program("impala")
    with program.group("learner"):
        program.add_node(nodes.colocate(queue, learner))
    with program.group("actor"):
        for index in range(experiment.num_actors):
            inference = experiment.inference(learner, queue, actors=1)
            program.add_node(nodes.colocate(inference, experiment.actor(inference, index)))
    if experiment.num_evaluators:
        with program.group("evaluator"):
            for index in range(experiment.num_evaluators):
                inference = experiment.inference(learner, queue, actors=1)
                program.add_node(nodes.colocate(inference, experiment.evaluator(inference, index)))
    return program


if __name__ == "__main__":
    experiment_lib.main("impala", impala)
