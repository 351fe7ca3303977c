"""Every fixed defect that can be patched in again, and the generator that finds it.

``docs/testing.md`` describes each one. A defect is a function that patches one method or constant of the shipped
classes (or, for archivers, of the running archivers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.broker import filter_defects, priority_defects, rate_defects
from tests.broker import test_lost_files as lost_files
from tests.meta import firing_defects
from tests.outbox import relay_defects
from tests.plants import generators
from tests.plants.generators import Generator
from tests.sim import ordered_defects, world_defects
from tests.spark import source_defects
from tests.support import broker_defects, transaction_defects
from tests.support import ordered_defects as model_defects

Defect = Callable[[pytest.MonkeyPatch], None]


class Plant(NamedTuple):
    """A defect, the generator that finds it, and seeds that find it quickly."""

    defect: Defect
    generator: Generator
    #: Seeds for the ordinary tests; empty: another test finds it, or only the deep tests do.
    seeds: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.defect.__name__


def of_archivers(patch: pytest.MonkeyPatch, defect: Callable[..., None]) -> None:
    patch.setattr(generators, "archivers_plants", [defect])


def ask_only_for_ones_own_number(patch: pytest.MonkeyPatch) -> None:
    """A slow archiver commits a manifest over later ones."""
    from tests.spark.archiver_defects import checks_only_its_own_number

    of_archivers(patch, checks_only_its_own_number)


PLANTS: list[Plant] = [
    # Delayed messages and routes.
    Plant(ordered_defects.deliver_behind_the_fence, generators.WORLDS),
    Plant(ordered_defects.ask_brokers_that_hold_nothing, generators.ORDERED_CLUSTER),
    Plant(broker_defects.forget_bucketed_rows, generators.SCHEDULE_MODEL, (1, 2)),
    # Recurring messages.
    Plant(firing_defects.take_over_under_another_producer, generators.FIRING_MODEL, (12, 18)),
    Plant(firing_defects.count_from_the_clock_after_a_pause, generators.FIRING_MODEL, (16,)),
    # Transactions.
    Plant(transaction_defects.publish_half_messages_again, generators.TRANSACTION_MODEL, (0, 1, 2, 3)),
    Plant(transaction_defects.keep_half_messages_of_deleted_subjects, generators.TRANSACTION_MODEL),
    Plant(transaction_defects.check_transactions_that_got_another_message, generators.TRANSACTION_MODEL, (0, 1, 2)),
    Plant(transaction_defects.give_the_place_of_a_cancelled_message_to_another, generators.WORLDS, (12,)),
    Plant(transaction_defects.roll_back_after_a_commit_without_answer, generators.WORLDS, (0,)),
    # Filters of groups.
    Plant(filter_defects.leave_out_what_has_no_room, generators.WORLDS, (1,)),
    Plant(filter_defects.hold_what_is_left_out, generators.FILTER_MODEL, (39,)),
    Plant(filter_defects.record_nothing_that_is_left_out, generators.FILTER_MODEL, (3,)),
    Plant(source_defects.negate_what_is_true_of_null, generators.PUSHED_FILTERS, (1, 4)),
    Plant(source_defects.compare_every_double_exactly, generators.PUSHED_FILTERS, (4,)),
    Plant(filter_defects.leave_out_what_is_not_examined, generators.FILTER_MODEL, (1,)),
    # Rates.
    Plant(rate_defects.begin_with_a_second_of_tokens, generators.RATE_MODEL, (0, 1)),
    Plant(rate_defects.leave_limited_pulls_suspended, generators.RATE_MODEL, (0, 1)),
    Plant(filter_defects.forget_addresses_at_a_restart, generators.FILTER_MODEL, (3,)),
    # Priorities and fairness.
    Plant(priority_defects.serve_the_highest_priority_only, generators.PRIORITY_MODEL, (6, 26)),
    Plant(priority_defects.forget_passed_rows_at_a_checkpoint, generators.PRIORITY_MODEL, (11, 19)),
    Plant(priority_defects.forget_rows_that_were_returned, generators.PRIORITY_MODEL, (2, 3)),
    Plant(priority_defects.put_back_nothing, generators.PRIORITY_MODEL, (0, 1)),
    Plant(priority_defects.say_that_no_row_overtook_another, generators.AUDITED_PRIORITIES, (6, 7)),
    # Storage.
    Plant(broker_defects.trust_the_page_cache, generators.CRASH_POINTS),
    Plant(broker_defects.define_partitions_once, generators.CRASH_POINTS),
    Plant(broker_defects.believe_numbers_alone, generators.CRASH_POINTS),
    Plant(broker_defects.delete_letters_before_it_is_known, generators.CRASH_POINTS),
    Plant(broker_defects.leave_consume_files_of_the_dead, generators.CRASH_POINTS),
    Plant(broker_defects.remember_who_left, generators.BROKER_LIVES, (1, 2, 3, 4, 5, 6)),
    Plant(lost_files.believe_marks_of_frames_alone, generators.OVERWRITTEN_FILES),
    Plant(lost_files.begin_where_the_first_file_does, generators.REMOVED_FILES),
    Plant(broker_defects.believe_equal_hashes, generators.QUERY_MODEL, (0, 1)),
    Plant(broker_defects.compare_whole_hashes, generators.QUERY_MODEL, (0, 1)),
    Plant(broker_defects.believe_indexes_are_complete, generators.QUERY_MODEL, (0, 1)),
    # Ordered groups.
    Plant(broker_defects.skip_copies_behind_a_stale_start, generators.ORDERED_MODEL, (0,)),
    Plant(model_defects.take_a_row_that_does_not_fit_again, generators.ORDERED_MODEL, (0, 2)),
    Plant(model_defects.believe_any_number, generators.ORDERED_MODEL, (0, 2, 4)),
    Plant(model_defects.believe_any_key, generators.ORDERED_MODEL, (4, 8)),
    Plant(model_defects.believe_any_name, generators.ORDERED_MODEL, (10,)),
    Plant(model_defects.keep_recovered_keys_apart, generators.ORDERED_MODEL, (3, 18)),
    Plant(model_defects.count_rows_of_others, generators.ORDERED_MODEL, (2,)),
    Plant(model_defects.rewind_over_returned_rows, generators.ORDERED_MODEL, (1, 3)),
    Plant(model_defects.forget_pauses_at_a_restart, generators.ORDERED_MODEL, (6, 9)),
    Plant(model_defects.remember_every_key, generators.ORDERED_MODEL, (4,)),
    # Clients and apps.
    Plant(world_defects.interrupt_closing, generators.WORLDS),
    Plant(world_defects.stay_attached_to_all_subjects, generators.WORLDS, (0,)),
    Plant(world_defects.start_a_known_group_again_on_new_partitions, generators.WORLDS),
    Plant(world_defects.end_the_app_with_a_body_that_does_not_decode, generators.WORLDS, (0,)),
    Plant(world_defects.overtake_sends_that_wait_for_room, generators.WORLDS, (1,)),
    Plant(world_defects.return_a_message_while_its_thread_runs, generators.WORLDS, (44,)),
    Plant(world_defects.throw_rows_away_at_a_clean_stop, generators.SHARED_CLUSTER, (0,)),
    Plant(world_defects.correlate_replies_by_numbers_alone, generators.WORLDS, (0,)),
    # The outbox.
    Plant(relay_defects.renew_the_lease_of_another_relay, generators.OUTBOX, (15,)),
    Plant(relay_defects.look_behind_the_highest_id_only, generators.OUTBOX, (0,)),
    Plant(relay_defects.number_again_after_a_crash, generators.OUTBOX, (4,)),
    Plant(relay_defects.follow_the_route_at_once, generators.OUTBOX, (1,)),
    # Archives and Spark.
    Plant(ask_only_for_ones_own_number, generators.ARCHIVERS, (10, 2, 0, 4)),
    Plant(world_defects.forget_decisions_by_the_wall_clock, generators.SINK_CLUSTER),
]
