"""Descriptions of a model's fields: the docstrings below them, read from the source when help or
a schema shows them. pydantic would read the sources of all models at every start."""

import ast
import inspect
import textwrap
from functools import cache

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema


def described_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a model, each with its description, inherited ones too."""
    for kind in model.__mro__:
        for name, text in _docstrings(kind).items() if issubclass(kind, BaseModel) else ():
            if name in model.model_fields and model.model_fields[name].description is None:
                model.model_fields[name].description = text
    return model.model_fields


class DescribedSchema(GenerateJsonSchema):
    """Makes a JSON schema with these descriptions on its properties."""

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        """Return the schema of a model."""
        model_schema = super().model_schema(schema)
        for name, field in described_fields(schema["cls"]).items():
            if field.description and name in model_schema.get("properties", {}):
                model_schema["properties"][name].setdefault("description", field.description)
        return model_schema


@cache
def _docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings of the fields that a class itself declares."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # made by code, not written
        return {}
    docstrings: dict[str, str] = {}
    field: str | None = None
    declared = ast.parse(source).body[0]
    for statement in declared.body if isinstance(declared, ast.ClassDef) else ():
        match statement:
            case ast.Expr(ast.Constant(str(text))) if field is not None:
                docstrings[field] = inspect.cleandoc(text)
        match statement:
            case ast.AnnAssign(ast.Name(name)):
                field = name
            case _:
                field = None
    return docstrings
