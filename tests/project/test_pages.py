"""Each page with commands is typed from its text by a test, or the list here says why not."""

import ast
import re
from pathlib import Path

import pytest

from tests.paths import DOCS, ROOT

FOLDERS = ("start", "member", "operate", "research", "reference")
OTHER = (
    "tests/fedpareto/simulation/test_data_kinds.py::"
    "test_the_examples_of_models_and_data_of_another_form_are_those_of_the_page_and_learn"
)
# The tests that type a page, by its name; of a part that none of them types, see them.
TYPED = {
    "start/adapters-and-segmentation.md": (
        "tests/pages/test_start.py::test_a_language_model_learns_by_adapters",
        "tests/pages/test_start.py::test_images_are_segmented_and_the_best_model_is_exported",
    ),
    "start/existing-clients.md": (
        "tests/pages/test_start.py::test_a_lightning_module_is_rehearsed_and_takes_part",
        "tests/pages/test_start.py::test_a_model_of_transformers_is_rehearsed_and_takes_part",
        "tests/pages/test_start.py::test_a_flower_app_takes_part",
    ),
    "start/first-federation.md": (
        "tests/pages/test_start.py::test_a_federation_on_three_machines_is_set_up_and_its_model_used",
    ),
    "start/models-of-another-form.md": (OTHER,),
    "start/moving-a-worker.md": ("tests/pages/test_start.py::test_a_worker_is_moved_and_of_two_copies_one_goes_on",),
    "start/python.md": ("tests/pages/test_start.py::test_python_simulates_starts_a_federation_and_works_with_one",),
    "start/three-hospitals.md": ("tests/pages/test_start.py::test_the_specification_for_three_hospitals_is_rehearsed",),
    "start/three-terminals.md": (
        "tests/pages/test_three_terminals.py::test_a_reader_of_the_first_tutorial_sees_what_the_page_shows",
    ),
    "start/your-own-task.md": (
        "tests/pages/test_start.py::test_a_task_of_ones_own_is_written_rehearsed_and_trained_in_a_federation",
    ),
    "start/your-own-trainer.md": (
        "tests/pages/test_start.py::test_trainers_of_ones_own_train_in_a_simulation_a_rehearsal_and_a_federation",
    ),
    "member/differential-privacy.md": ("tests/pages/test_member.py::test_the_noise_for_an_epsilon_is_planned",),
    "member/privacy.md": (
        "tests/pages/test_member.py::test_owners_make_and_pin_a_roster_change_it_and_look_at_failures",
    ),
    "member/worker-file.md": ("tests/pages/test_member.py::test_a_worker_runs_by_its_file",),
    "member/your-site.md": (
        "tests/pages/test_member.py::test_an_owner_joins_runs_a_worker_sees_what_left_decides_pauses_and_leaves",
    ),
    "operate/administrators.md": (
        "tests/pages/test_operate.py::test_administrators_are_made_log_in_are_revoked_and_two_consent",
    ),
    "operate/alerts.md": ("tests/pages/test_operate.py::test_alerts_are_listed_and_delivered_and_a_contact_is_noted",),
    "operate/audit-log.md": ("tests/pages/test_operate.py::test_the_audit_log_is_shown_followed_and_verified",),
    "operate/bad-member.md": (
        "tests/pages/test_bad_member.py::test_a_reader_finds_the_bad_member_shuts_it_out_and_sees_what_the_page_shows",
    ),
    "operate/console.md": ("tests/pages/test_operate.py::test_the_console_is_opened",),
    "operate/network.md": (
        "tests/pages/test_operate.py::test_a_federation_has_one_port_a_proxy_is_passed_and_a_connection_is_tested",
    ),
    "operate/operations.md": (
        "tests/pages/test_operate.py::test_a_coordinator_is_operated_from_its_first_start_to_a_restored_backup",
    ),
    "operate/several-coordinators.md": (
        "tests/pages/test_operate.py::test_a_second_coordinator_is_made_checked_and_served",
    ),
    "operate/tracking.md": ("tests/pages/test_operate.py::test_the_numbers_of_a_run_go_to_tensorboard",),
    "operate/upgrading.md": ("tests/pages/test_operate.py::test_a_coordinator_is_upgraded_and_goes_back",),
    "reference/verify.md": (
        "tests/pages/test_reference.py::test_an_outsider_a_user_of_the_model_and_a_member_verify_a_run",
    ),
    "research/attacks.md": (
        "tests/pages/test_research.py::test_attacks_are_listed_and_rehearsed_by_a_worker_and_a_backdoor_is_simulated",
    ),
    "research/evaluation.md": ("tests/pages/test_research.py::test_models_are_evaluated_at_the_members",),
    "research/experiments.md": (
        "tests/pages/test_research.py::test_experiments_are_listed_and_one_of_ones_own_is_run",
    ),
    "research/objectives.md": ("tests/pages/test_research.py::test_a_task_with_two_objectives_is_simulated",),
    "research/personal-parameters.md": (
        "tests/pages/test_research.py::test_personal_parameters_and_the_shared_ones_are_exported",
    ),
    "research/plugins.md": (
        "tests/pages/test_research.py::test_a_rule_a_stage_an_attack_and_a_sketch_of_ones_own_are_tried_and_run",
    ),
    "research/standardise.md": (
        "tests/pages/test_research.py::test_a_model_is_filled_from_statistics_and_predicts_from_inputs_as_they_are",
    ),
    "research/statistics.md": ("tests/pages/test_research.py::test_what_members_hold_is_asked_for",),
    "research/simulation.md": (
        "tests/pages/test_research.py::test_a_run_is_simulated_read_exported_resumed_and_taken_into_a_notebook",
    ),
}
NOT_TYPED = {
    "../README.md": "`make demo` installs PyTorch; tests/fedpareto/test_demo.py plays the demo",
    "operate/benchmarks.md": "takes an hour; tests/project/test_benchmarks.py runs the scenarios in small forms",
    "reference/run-spec.md": "one command; tests/project/test_docs.py reads its specification",
    "operate/monitoring.md": "curl and openssl alone; tests/coordinator/monitoring/test_number_keeper.py scrapes",
}


def shells(page: str) -> list[tuple[str, str]]:
    """The blocks of commands of a page, each after its language."""
    return re.findall(r"^ *```(console|sh)\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL)


def pages() -> dict[str, str]:
    """The texts of the pages of these folders with commands, of the tutorials, and of README.md, by their names."""
    found = [path for folder in FOLDERS for path in (DOCS / folder).glob("*.md")] + [ROOT / "README.md"]
    texts = {
        str(Path("..") / path.name if path.parent == ROOT else path.relative_to(DOCS)): path.read_text()
        for path in found
    }
    return {name: text for name, text in texts.items() if name.startswith("start/") or shells(text)}


def test_each_page_with_commands_is_typed_by_a_test_or_a_reason_is_given() -> None:
    assert sorted(pages()) == sorted([*TYPED, *NOT_TYPED])
    assert all((ROOT / path).exists() for reason in NOT_TYPED.values() for path in re.findall(r"tests/\S+\.py", reason))


@pytest.mark.parametrize("page", TYPED)
def test_the_tests_of_a_page_exist_and_read_it(page: str) -> None:
    for named in TYPED[page]:
        path, _, test = named.partition("::")
        source = (ROOT / path).read_text()
        (function,) = (
            node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == test
        )
        constants = "".join(re.findall(r"^[A-Z_]+ = .*$", source, re.MULTILINE))
        assert Path(page).name in ast.unparse(function) + constants, named


@pytest.mark.parametrize("page", TYPED)
def test_a_page_has_the_commands_of_fedpareto_where_a_reader_types_them(page: str) -> None:
    others = [body for language, body in shells(pages()[page]) if language == "sh"]
    assert [body for body in others if re.search(r"^(\$ )?fedpareto ", body, re.MULTILINE)] == []
