"""An inference pool: servers in processes of their own between the actors and the learner.

python -m programs.inference_pool --num_inference_servers=2 --logdir=runs/cartpole-pool
"""

import launchpad as lp
from absl import flags

from programs import experiment as experiment_lib
from seedlib import nodes

_SERVERS = flags.DEFINE_integer("num_inference_servers", 2, "Inference servers.", 1)


def inference_pool(experiment: experiment_lib.Experiment) -> lp.Program:
    """Returns the graph. Actors are spread over the servers, and move when theirs goes away."""
    queue = experiment.queue()
    learner = experiment.learner(queue)
    # Each can serve all actors, for when the others are away.
    pool = [experiment.inference(learner, queue) for _ in range(_SERVERS.value)]

    program = lp.Program("inference_pool")
    with program.group("learner"):
        program.add_node(nodes.colocate(queue, learner))
    with program.group("inference"):
        for inference in pool:
            program.add_node(inference)
    with program.group("actor"):
        for index in range(experiment.num_actors):
            program.add_node(experiment.actor(pool, index))
    if experiment.num_evaluators:
        with program.group("evaluator"):
            for index in range(experiment.num_evaluators):
                program.add_node(experiment.evaluator(pool[index % len(pool)], index))
    return program


if __name__ == "__main__":
    experiment_lib.main("inference_pool", inference_pool)
