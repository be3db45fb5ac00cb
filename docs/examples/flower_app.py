"""A Flower app for the digits, as it is."""

import flower_net
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


def loaded(message: Message, context: Context):
    net = flower_net.Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    config = context.node_config
    return net, flower_net.load_data(config["partition-id"], config["num-partitions"])


@app.train()
def train(message: Message, context: Context):
    net, (trained, _) = loaded(message, context)
    config = context.run_config
    loss = flower_net.train(net, trained, config["local-epochs"], message.content["config"]["lr"], config["batch-size"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(trained[0])})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context):
    net, (_, tested) = loaded(message, context)
    loss, accuracy = flower_net.test(net, tested)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(tested[0])})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
