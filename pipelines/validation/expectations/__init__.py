"""Expectations about language-model data, for any Great Expectations suite over a pandas frame.

Importing this package registers them and their metrics with Great Expectations:

    import great_expectations as gx
    from pipelines.validation.expectations import ExpectColumnValuesToHoldNoPii

    source = gx.get_context(mode="ephemeral").data_sources.add_pandas("pandas")
    whole = source.add_dataframe_asset("texts").add_batch_definition_whole_dataframe("whole")
    batch = whole.get_batch({"dataframe": pd.DataFrame({"text": ["call 212-555-0123"]})})
    assert not batch.validate(ExpectColumnValuesToHoldNoPii(column="text")).success

The examples beside the classes are about such a `batch`.
"""
