"""A Flower grid without a network, for the tests of flower and simulation."""

import copy

from flwr.app import Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity


class Here:
    """A grid without a network: nodes are calls of the app."""

    def __init__(self, app, n=5):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # who sends messages from this process
        self.app, self.log = app, []
        self.contexts = {100 + k: self.context(100 + k, k) for k in range(n)}

    @staticmethod
    def context(node, k):
        return Context(run_id=1, node_id=node, node_config={"partition-id": k}, state=RecordDict(), run_config={})

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, timeout=None):
        for i, m in enumerate(messages):
            m.metadata.__dict__["_message_id"] = f"{len(self.log)}-{i}"
        self.log.append(messages)
        replies = [self.deliver(copy.deepcopy(m)) for m in messages]
        return [r for r in replies if r is not None]

    def deliver(self, message):
        return self.app(message, self.contexts[message.metadata.dst_node_id])


def lean(records, *names):
    """Records as a server has them that is told no more than it needs."""
    return [{k: v for k, v in r.items() if k not in names} for r in records]
