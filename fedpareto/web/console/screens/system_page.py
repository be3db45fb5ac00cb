"""The coordinator's machine: database, disk by run, limits that were hit, versions, and the backup."""

from datetime import UTC, datetime

from federation.v1 import admin_pb2 as v1
from fedpareto import __version__
from fedpareto.web.console.federation_reader import Reader
from fedpareto.web.console.screens import wording
from fedpareto.web.console.view import PageRequest, PageView, Screen
from fedpareto.web.pages.alert_list import alert_list, lines_of
from fedpareto.web.pages.html import Html

_KINDS = ("DISK_LOW", "BACKUP_OLD", "CERTIFICATE_ENDS", "CLOCK_WRONG")


def _view(reader: Reader, asked: PageRequest) -> PageView:
    system = reader.call(lambda stub: stub.GetSystem(v1.GetSystemRequest()))
    disk = reader.call(lambda stub: stub.GetDisk(v1.GetDiskRequest()))
    lists = reader.lists
    kinds = {v1.AlertKind.Value(f"ALERT_KIND_{name}") for name in _KINDS}
    alerts = [alert for alert in (lists.alerts if lists else ()) if alert.kind in kinds]
    age = ""
    if system.HasField("backed_up"):
        days = -wording.days_left(system.backed_up.ToDatetime(UTC), datetime.now(UTC)) - 1
        age = "today" if days < 1 else f"{days} days ago"
    return PageView(
        "System",
        "system.html",
        {
            "system": system,
            "disk": disk,
            "age": age,
            "alerts": alert_list(lines_of(alerts, reader.names.named)) if alerts else Html(""),
            "own_version": __version__,
            "administrators": lists.administrators if lists else (),
        },
    )


SCREEN = Screen(_view, lambda reader, asked: None, "/system")
