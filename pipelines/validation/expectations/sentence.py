"""What the expectations share: Data Docs show each as a sentence, and a bad row has a reason."""

from typing import Any, ClassVar

from great_expectations.expectations.expectation import ColumnMapExpectation
from great_expectations.render import (
    LegacyDiagnosticRendererType,
    LegacyRendererType,
    RenderedStringTemplateContent,
)
from great_expectations.render.renderer.renderer import renderer
from great_expectations.render.renderer_configuration import (
    RendererConfiguration,
    RendererValueType,
)


class Sentence:
    """Mixin of an expectation that says in plain words what it demands.

    Both of Great Expectations' renderers, of Data Docs and of the newer atomic content, show it.
    """

    def sentence(self) -> str:
        """Return what is demanded, with this expectation's own numbers."""
        raise NotImplementedError

    @classmethod
    def shown(cls, observed: Any) -> str:
        """Return an observed value for users."""
        return f"{observed:.4g}" if isinstance(observed, float) else str(observed)

    @classmethod
    def _prescriptive_template(cls, renderer_configuration: Any) -> Any:
        text = cls(**renderer_configuration.kwargs).sentence()
        renderer_configuration.add_param("sentence", RendererValueType.STRING, text)
        renderer_configuration.template_str = "$sentence"
        return renderer_configuration

    @classmethod
    @renderer(renderer_type=LegacyRendererType.PRESCRIPTIVE)
    def _prescriptive_renderer(
        cls,
        configuration: Any = None,
        result: Any = None,
        runtime_configuration: Any = None,
    ) -> list[Any]:
        found = RendererConfiguration(
            configuration=configuration, result=result, runtime_configuration=runtime_configuration
        )
        # A parameter, not the template itself: its value is escaped.
        template = {
            "template": "$sentence",
            "params": {"sentence": cls(**found.kwargs).sentence()},
        }
        return [
            RenderedStringTemplateContent(
                content_block_type="string_template", string_template=template
            )
        ]

    @classmethod
    @renderer(renderer_type=LegacyDiagnosticRendererType.OBSERVED_VALUE)
    def _diagnostic_observed_value_renderer(
        cls,
        configuration: Any = None,
        result: Any = None,
        runtime_configuration: Any = None,
    ) -> str:
        observed = result.result.get("observed_value") if result else None
        if observed is None:
            return str(cls._get_observed_value_from_evr(result))  # type: ignore[attr-defined]
        return cls.shown(observed)


class AssessedVariant(Sentence):
    """Mixin of an expectation of one observed value, which it judges by itself."""

    def decide(self, metrics: dict[str, Any]) -> tuple[bool, Any]:
        """Return whether it holds, and the observed value."""
        raise NotImplementedError

    def _validate(
        self,
        metrics: dict[str, Any],
        runtime_configuration: Any = None,
        execution_engine: Any = None,
    ) -> Any:
        success, observed = self.decide(metrics)
        return {"success": success, "result": {"observed_value": observed}}


class ReasonedRows(Sentence, ColumnMapExpectation):
    """Base of an expectation of each row, which says why it does not hold of a bad one."""

    success_keys: ClassVar[tuple[str, ...]] = ("mostly",)

    def reason(self, value: Any) -> str | None:
        """Return why a value is bad; None of a good one."""
        raise NotImplementedError

    def _almost(self) -> str:
        """Return how many of the rows must be good, as the end of a sentence."""
        return "." if self.mostly >= 1 else f", in at least {percent(self.mostly)} of the rows."


def percent(share: float) -> str:
    """Return a share as people write it: 12.3%, 0.01%."""
    return f"{100 * share:.3g}%"
