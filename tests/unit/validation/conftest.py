"""A suite of Great Expectations over a pandas frame, as anyone may have one."""

import pytest


@pytest.fixture(scope="session")
def held():
    """Holds one expectation against a frame: `held(frame, expectation) -> result`."""
    import great_expectations as gx

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    asset = context.data_sources.add_pandas("pandas").add_dataframe_asset("frame")
    whole = asset.add_batch_definition_whole_dataframe("whole")

    def hold(frame, expectation):
        suite = gx.ExpectationSuite(name="alone", expectations=[expectation])
        result = whole.get_batch({"dataframe": frame}).validate(suite)
        (found,) = result.results
        assert not found.exception_info.get("raised_exception"), found.exception_info
        return found

    return hold
