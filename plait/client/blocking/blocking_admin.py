"""``client.admin`` for blocking code."""

from __future__ import annotations

from plait.client.admin.admin import Admin
from plait.client.blocking.proxy import Blocking, blocking


class SyncAdmin(Blocking[Admin]):
    """The operations of ``plait subject``, ``group``, ``dlq``, ``schedule`` and ``cluster``.

    The client's thread calls the ``progress`` of ``resend_dead`` and ``purge_dead``.
    """

    subjects = blocking(Admin.subjects)
    subject = blocking(Admin.subject)
    create_subject = blocking(Admin.create_subject)
    set_subject = blocking(Admin.set_subject)
    delete_subject = blocking(Admin.delete_subject)
    groups = blocking(Admin.groups)
    group = blocking(Admin.group)
    reset_group = blocking(Admin.reset_group)
    set_group = blocking(Admin.set_group)
    delete_group = blocking(Admin.delete_group)
    server = blocking(Admin.server)

    route = blocking(Admin.route)
    expand_subject = blocking(Admin.expand_subject)
    brokers = blocking(Admin.brokers)
    set_broker_state = blocking(Admin.set_broker_state)
    forget_broker = blocking(Admin.forget_broker)
    allocation = blocking(Admin.allocation)

    parked = blocking(Admin.parked)
    resume_key = blocking(Admin.resume_key)
    skip_key = blocking(Admin.skip_key)
    resume_all = blocking(Admin.resume_all)
    skip_all = blocking(Admin.skip_all)

    dead_queues = blocking(Admin.dead_queues)
    dead_letters = blocking(Admin.dead_letters)
    dead_letter = blocking(Admin.dead_letter)
    dead_reasons = blocking(Admin.dead_reasons)
    resend_dead = blocking(Admin.resend_dead)
    purge_dead = blocking(Admin.purge_dead)

    scheduled = blocking(Admin.scheduled)
    schedule_counts = blocking(Admin.schedule_counts)
    cancel_scheduled = blocking(Admin.cancel_scheduled)
    reschedule = blocking(Admin.reschedule)
