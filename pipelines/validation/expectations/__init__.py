"""Expectations about language-model data, for any Great Expectations suite over a pandas frame.

Importing a module of this package registers its expectations and metrics:

    import great_expectations as gx
    import pandas as pd
    from pipelines.validation.expectations.personal_data import ExpectColumnValuesToHoldNoPii

    source = gx.get_context(mode="ephemeral").data_sources.add_pandas("pandas")
    whole = source.add_dataframe_asset("texts").add_batch_definition_whole_dataframe("whole")
    batch = whole.get_batch({"dataframe": pd.DataFrame({"text": ["jane@acme-corp.com"]})})
    assert not batch.validate(ExpectColumnValuesToHoldNoPii(column="text")).success

The examples beside the classes are about such a `batch`.
"""
