"""The table of commands: all that `fedpareto --help` and the help of a group load.

A command's module is loaded when the command is called, or its own help. It has the parameters and the help; the
imports of its work wait (`fedpareto.on_first_use`).
"""

from functools import cached_property
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

# By group: the name of a command, its function (or the Typer app of a group that is a command, too) in a module of this
# package, and the first sentence of its help.
TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "fedpareto": {
        "demo": ("demo:demo_command", "Run a federation of ten hospitals on this machine."),
        "new": ("research.new_task:new_command", "Write a task of your own that runs as it is."),
        "local": ("admin.local_run:local_command", "Start a federation of your members on this machine."),
        "simulate": ("research.simulate:simulate_command", "Run a specification on simulated clients."),
        "console": ("admin.console:console_command", "Show the federation in a browser, live and read-only."),
        "report": ("report:report_command", "Write a report of a run as one HTML page."),
        "aggregate": ("research.aggregate:aggregate_command", "Combine the updates in a file into one direction."),
        "verify": ("verify:verify_command", "Verify the record of a run: signatures, rules, models."),
        "explain": ("reasons.explain_reason:explain_command", "Say what a reason means, and what to do."),
        "completion": (
            "completion:completion_command",
            "Print the script with which a shell completes commands by Tab.",
        ),
    },
    "coordinator": {
        "init": ("coordinator.daemon:init", "Make a federation."),
        "serve": ("coordinator.serve:serve", "Run the daemon until it is stopped (SIGTERM or Ctrl-C)."),
        "check": ("coordinator.daemon:check", "Check settings, keys, ports, database, blobs, clock and disk."),
        "admin": ("coordinator.daemon:admin", "Make another administrator: its signing key and directory."),
        "restored": ("coordinator.daemon:restored", "Sign a statement for workers that a backup was restored."),
        "backup": ("coordinator.backup:backup_command", "Copy database and blobs to a directory."),
        "restore": ("coordinator.backup:restore_command", "Restore a backup, while no coordinator serves."),
        "copy-keys": ("coordinator.copy_keys:copy_keys_command", "Make the directory of a further coordinator."),
        "rotate-key": ("coordinator.daemon:rotate_key", "Replace the coordinator's signing key."),
    },
    "worker": {
        "join": ("member.join:join", "Become a member: make keys, get a certificate."),
        "run": ("member.worker:run", "Attend, and do the assigned work."),
        "config": (
            "member.worker_settings:config_command",
            "List the settings: their values, where each comes from, and what it means.",
        ),
        "restored": ("member.site.site_state:restored", "Show or accept the statement that a backup was restored."),
        "privacy": ("member.site.site_state:privacy", "Show what training with noise has spent of each data set."),
        "failures": ("member.site.site_state:failures", "Show or forget what failed in private rounds."),
        "attacks": ("member.trial:attacks", "List the attacks that can be rehearsed, with their options."),
        "doctor": (
            "member.doctor:doctor_command",
            "Check settings, network, keys, clock, disk, device, data and task.",
        ),
        "renew": ("member.next_keys:renew_command", "Get the next certificate of a worker that does not run."),
        "rotate-key": (
            "member.next_keys:rotate_key_command",
            "Replace the signing key; the old key signs the new one.",
        ),
        "export": ("member.personal:export_command", "Write the personal parameters of this member in a run."),
        "model": ("member.fetch_model:model_command", "Write a model of a run that this member has contributed to."),
        "trainer": ("member.trainer_choices:trainer_command", "Train for a worker, over standard input and output."),
        "runs": ("member.site.run_requests:runs_command", "List the runs that asked this site to take part."),
        "status": ("member.site.site_now:status_command", "Say what the worker does now: connected, paused, at work."),
        "console": (
            "member.site.site_console:console_command",
            "Show your site in a browser: what it does, was asked, has sent and spent.",
        ),
        "pause": ("member.site.site_now:pause_command", "Begin no new work, until you resume or until a time."),
        "resume": ("member.site.site_now:resume_command", "End a pause."),
        "leave": ("member.site.leave:leave_command", "Leave the federation, with a signed withdrawal."),
        "copied": (
            "member.site.copied:copied_command",
            "Show that a copy of this directory has started; decide which one goes on.",
        ),
        "approve": ("member.site.run_requests:approve_command", "Approve a run, with its present specification."),
        "refuse": ("member.site.run_requests:refuse_command", "Refuse a run, also one that was approved before."),
        "receipts": (
            "member.site.site_record:receipts_command",
            "List, verify and compare receipts of assignments and replies.",
        ),
        "left": ("member.site.left:left_command", "Show what left this site: each reply, its numbers and its outcome."),
        "log": ("member.site.site_record:log_command", "Show what this site has contributed."),
        "verify": (
            "member.site.site_record:verify_command",
            "Verify that this site's replies are in the record of a run.",
        ),
    },
    "roster": {
        "card": ("member.roster:card", "Print this member's entry in a roster: its name and its public key."),
        "pin": ("member.roster:pin", "Trust these members and keys, and no others, in private rounds."),
        "show": ("member.roster:show", "Show the pinned roster, and how many private rounds have counted."),
    },
    "admin": {
        "status": ("admin.members:status", "Say whether all is well, and what needs you."),
        "alerts": ("admin.members:alerts", "List what needs attention, newest first."),
        "notify": ("admin.alerting.notify:notify", "Deliver alerts by webhook, e-mail or chat."),
        "login": ("admin.members:login", "Log in with the signing key, for some hours."),
        "join-string": ("admin.admission.joining:join_string", "Make a join string for a new member."),
        "join-strings": ("admin.admission.joining:join_strings", "List the join strings that can still be used."),
        "cancel-join-string": (
            "admin.admission.joining:cancel_join_string",
            "Cancel the unused join strings for a name.",
        ),
        "clients": ("admin.members:clients", "List the members, and what is wrong with each."),
        "client": ("admin.members:show_client", "Show a member."),
        "tag": ("admin.members:tag", "Set the tags of a member, and note its contact."),
        "coordinators": ("admin.members:coordinators", "List the coordinators, and the runs that each conducts."),
        "admins": ("admin.members:admins", "List the administrators."),
        "approve": ("admin.admission.approving:approve", "Approve pending members, so that they get work."),
        "revoke": ("admin.officers:revoke", "Revoke a member, at once and permanently."),
        "forget": ("admin.officers:forget", "Remove the updates that a member has sent."),
        "revoke-admin": ("admin.officers:revoke_admin", "Revoke an administrator, at once."),
        "requests": ("admin.officers:requests", "List the requests that wait for another officer."),
        "consent": ("admin.admission.consenting:consent", "Consent to requests of another officer."),
        "withdraw": ("admin.officers:withdraw", "Withdraw a request, or refuse one of another officer."),
        "disk": ("admin.runs:disk", "Show the disk space of the record."),
        "submit": ("admin.submit:submit", "Submit a run."),
        "runs": ("admin.runs:runs", "List the runs, newest first."),
        "run": ("admin.runs:show_run", "Show a run."),
        "pause": ("admin.runs:pause", "Pause a run."),
        "resume": ("admin.runs:resume", "Resume a paused run."),
        "stop": ("admin.runs:stop", "Stop a run for good."),
        "watch": ("admin.runs:watch", "Show the rounds of a run until it ends."),
        "follow": (
            "admin.tracking.follow:follow_command",
            "Send the numbers of a run to tracking tools until it ends.",
        ),
        "rounds": ("admin.runs:rounds", "List the rounds of a run."),
        "compare": ("admin.runs:compare", "Show runs beside each other."),
        "round": ("admin.runs:show_round", "Show a round."),
        "statistics": ("admin.described.statistics:statistics", "Show what a run has told of the members' data."),
        "replies": ("admin.runs:replies", "List the received replies, including refused ones."),
        "export": ("admin.download:export", "Write a model of a run to a file."),
        "bundle": ("admin.bundle:bundle_command", "Write the record of a run to one file."),
        "replay": ("admin.bundle:replay_command", "Show what another algorithm would have done."),
        "audit": ("admin.audit:audit", "Show the audit log; `audit verify` verifies it."),
    },
    "experiment": {
        "list": ("research.experiment_list:list_command", "List the experiments."),
        "run": ("research.experiment_run:run_command", "Run an experiment: every method with every seed."),
        "compare": (
            "research.experiment_compare:compare_command",
            "Compare the finished runs with the published numbers.",
        ),
    },
    "privacy": {
        "plan": ("research.privacy_plan:plan", "Compute the noise for an epsilon, or the epsilon of a noise."),
    },
    "data": {
        "show": ("research.data:show", "Show how many samples of which class each client would hold."),
    },
}
# By group: the headings of its help, each with its commands. A group that is not here has one heading.
HEADINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "admin": {
        "The federation": ("status", "alerts", "notify", "coordinators", "login"),
        "Members": (
            *("join-string", "join-strings", "cancel-join-string", "clients", "client", "tag"),
            *("approve", "revoke", "forget"),
        ),
        "Runs": (
            *("submit", "runs", "run", "watch", "follow", "rounds", "round", "replies", "compare"),
            *("statistics", "pause", "resume", "stop"),
        ),
        "Officers and their requests": ("requests", "consent", "withdraw", "admins", "revoke-admin"),
        "Models and the record": ("export", "bundle", "replay", "audit", "disk"),
    }
}
# Typer's settings of commands, by their function.
_SETTINGS: dict[str, dict[str, Any]] = {"admin.runs:show_round": {"context_settings": {"ignore_unknown_options": True}}}


def load(target: str) -> Any:
    """The object that a target, "room.module:name", names in `fedpareto.cli`."""
    module, _, name = target.partition(":")
    return getattr(import_module(f"fedpareto.cli.{module}"), name)


class TableCommand(TyperCommand):
    """A command of the table; the command itself is loaded when it gets its arguments."""

    def __init__(self, name: str, target: str, help_text: str) -> None:
        super().__init__(name, help=help_text)
        self._target = target

    @cached_property
    def loaded(self) -> Any:
        """The command itself, a Click command or group."""
        target = load(self._target)
        if isinstance(target, typer.Typer):
            return typer.main.get_command(target)
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(self.name, **_SETTINGS.get(self._target, {}))(target)
        return typer.main.get_command(app)

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """The context of the command itself, in which Click goes on."""
        return self.loaded.make_context(*arguments, **settings)


class QuickHelpGroup(TyperGroup):
    """A group that shows the help of a command without reading its own options, for which Typer imports pydantic."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options. `completion` stands for Typer's, which change the user's files and ask for no shell."""
        typers = {"install_completion", "show_completion"}
        return [param for param in super().get_params(ctx) if param.name not in typers]

    def parse_args(self, context: Any, words: list[str]) -> list[str]:
        """Parses the words after the group's name. The help of a command ends them all."""
        if words and words[0] in self.commands and not set(context.help_option_names).isdisjoint(words):
            self.commands[words[0]].make_context(words[0], words[1:], parent=context)  # it ends here if help is shown
        return super().parse_args(context, words)


class TableGroup(QuickHelpGroup):
    """A group whose commands are those of the table under its name; groups inside it come after them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        rows = {name: TableCommand(name, *row) for name, row in TABLE[self.name or ""].items()}
        self.commands = {**rows, **self.commands}

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the commands below their headings; a command without one comes last."""
        headings = HEADINGS.get(self.name or "", {})
        with_heading = {name for names in headings.values() for name in names}
        rest = tuple(name for name in self.commands if name not in with_heading)
        width = max(map(len, self.commands))
        for heading, names in {**headings, "Commands": rest}.items():
            rows = [(f"{name:{width}}", self.commands[name].get_short_help_str(formatter.width)) for name in names]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)
