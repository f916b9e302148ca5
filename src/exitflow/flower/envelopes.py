"""Headers and payloads as Flower records.

A payload travels as one flat array: Flower sends every array of a record as an object of its own, with its own
requests, so a model of a hundred tensors is best packed before.
"""

from __future__ import annotations

import json
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from exitflow.flower.frames import Header

DEEPEST = 10  # levels of a header


def to_records(header: Header, payload: bytes) -> RecordDict:
    """What goes into a Flower message."""
    records = RecordDict({"header": ConfigRecord({"json": json.dumps(header)})})
    if payload:
        records["payload"] = ArrayRecord({"packed": Array("uint8", (len(payload),), "bytes", payload)})
    return records


def from_records(records: RecordDict) -> tuple[Header, bytes]:
    """What `to_records` was given; ValueError where the records are none of ours."""
    try:
        header = json.loads(str(records.config_records["header"]["json"]))
        arrays = records.array_records
        payload = arrays["payload"]["packed"].data if "payload" in arrays else b""
    except KeyError as error:
        raise ValueError(f"the message has no {error}") from None
    except RecursionError:
        raise ValueError("the header of the message is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("the header of the message is no JSON object")
    if _is_deep(header):  # or whoever passes it on might fail
        raise ValueError("the header of the message is nested too deeply")
    return header, payload


def _is_deep(value: Any, levels: int = DEEPEST) -> bool:
    if not isinstance(value, dict | list):
        return False
    return not levels or any(
        _is_deep(inner, levels - 1) for inner in (value.values() if isinstance(value, dict) else value)
    )
