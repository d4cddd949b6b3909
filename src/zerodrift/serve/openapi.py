"""The OpenAPI document, made of the route table and of the types of bodies. Torch-free."""

from functools import cache
from typing import Any

import msgspec

from zerodrift.serve.routes import ROUTES, Level, ServedRoute

_REF = "#/components/schemas/{name}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": "string"},
                "param": {"type": ["string", "null"]},
            },
        }
    },
}


@cache
def document(version: str) -> dict[str, Any]:
    """As /openapi.json answers."""
    bodies = sorted(
        {route.body for route in ROUTES if route.body is not None}, key=lambda kind: kind.__name__
    )
    _, components = msgspec.json.schema_components(bodies, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "zerodrift serve",
            "version": version,
            "description": "Rollouts with the trainer's own bits, behind the routes that RL clients speak.",
        },
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "basic": {
                    "type": "http",
                    "scheme": "basic",
                    "description": "Any user, the token as password",
                },
            },
        },
    }


def _operation(route: ServedRoute) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "Done", "content": {route.media: {}}}
    if route.streams:
        answer["content"]["text/event-stream"] = {}
    refusal = {"content": {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}}
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_{route.path.strip('/').replace('/', '_').replace('.', '_')}",
        "summary": route.says,
        "tags": [route.level.name.lower()],
        "responses": {
            "200": answer,
            "4XX": {"description": "Refused: the code says why", **refusal},
            "5XX": {
                "description": "The server is stopping, or has failed",
                "content": {"application/json": {}},
            },
        },
        "security": [] if route.level is Level.OPEN else [{"bearer": []}, {"basic": []}],
    }
    if route.body is not None:
        schema = {"$ref": _REF.format(name=route.body.__name__)}
        operation["requestBody"] = {
            "required": not route.body_optional,
            "content": {"application/json": {"schema": schema}},
        }
    if route.query is not None:
        operation["parameters"] = _parameters(route.query)
    return operation


def _parameters(kind: type[msgspec.Struct]) -> list[dict[str, Any]]:
    schema = msgspec.json.schema(kind)
    properties = schema["$defs"][kind.__name__]["properties"]
    return [
        {"name": name, "in": "query", "required": False, "schema": _without_null(each)}
        for name, each in properties.items()
    ]


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A query has no way to say null."""
    if "enum" in schema:
        return {
            **{k: v for k, v in schema.items() if k != "default"},
            "enum": [v for v in schema["enum"] if v is not None],
        }
    return schema
