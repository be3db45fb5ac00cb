"""The figures of a task's own metrics over the rounds."""

from collections.abc import Iterator

from federation.record.metric_definitions import OWN, SUMMARIES
from fedpareto.formatting import UNKNOWN, number
from fedpareto.web.pages.charts import Series
from fedpareto.web.pages.html import Html, table
from fedpareto.web.pages.scales import Axis, general
from fedpareto.web.sections.layout import figure, line_figure, recorded
from fedpareto.web.sections.shown_run import ShownRun

_MOST = 12  # figures


def figures(data: ShownRun) -> Iterator[Html]:
    """A figure for each metric, or for each of its values: mean, mean by samples, worst and best member."""
    better = {kind.name: kind.better for kind in data.run.metrics}
    for name in data.own_metrics[:_MOST]:
        columns = recorded(data, *(f"{OWN}{name}/{of}" for of in SUMMARIES))
        series = [Series(of, values, index, dashed=of == "weighted") for index, (of, values, _) in enumerate(columns)]
        caption = (
            f"Every member measures {name} on its own data; {better.get(name.partition('/')[0], 'higher')} values are "
            "better. The mean counts every member the same, the weighted mean by the samples that it claims. A mean "
            "that improves while the worst member stays behind is bought at that member's expense."
        )
        absence = "No round of this run measured it."
        yield line_figure(data, name, absence, series, Axis(name, general), caption, columns)
    if (last := data.own_final) is not None:
        names = [name for name in data.own_metrics[:_MOST] if any(name in values for values in last.values.values())]
        rows = [
            [client, *(number(values[name]) if name in values else UNKNOWN for name in names)]
            for client, values in last.values.items()
        ]
        caption = f"What each member measured after round {last.round}, on its own data."
        yield figure("Every member at the end", table(["member", *names], rows), caption)
