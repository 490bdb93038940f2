"""What a library says hundreds of times a second is said now and then, and counted."""

import logging

from clawstream.cli.process import Seldom


def record(name: str, text: str, *values: object) -> logging.LogRecord:
    return logging.LogRecord(name, logging.ERROR, __file__, 1, text, values, None)


def test_a_line_is_said_once_in_a_while_whatever_is_in_it_and_then_with_how_often_it_was_not() -> None:
    now_s = 100.0
    seldom = Seldom("aiokafka", every_s=10.0, clock=lambda: now_s)
    assert seldom.filter(record("aiokafka.client", "no node %d", 1))
    assert [seldom.filter(record("aiokafka.client", "no node %d", node)) for node in (1, 2, 3)] == [False] * 3
    assert seldom.filter(record("aiokafka.client", "another line"))
    now_s = 110.0
    again = record("aiokafka.client", "no node %d", 4)
    assert seldom.filter(again)
    assert again.getMessage() == "no node 4 (and 3 more since this was said)"
    now_s = 120.0
    calm = record("aiokafka.client", "no node %d", 5)
    assert seldom.filter(calm)
    assert calm.getMessage() == "no node 5"


def test_lines_of_others_are_all_said() -> None:
    seldom = Seldom("aiokafka", clock=lambda: 0.0)
    assert [seldom.filter(record("clawstream.stream.runner.hosting", "stage=turns")) for _ in range(3)] == [True] * 3
    assert [seldom.filter(record("aiokafkaesque", "hello")) for _ in range(3)] == [True] * 3
