"""Errors of Spark leave the logs of other tests readable."""

import logging

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession


def test_an_error_of_spark_leaves_the_format_of_handlers_alone(
    spark: SparkSession,
) -> None:
    with pytest.raises(AnalysisException):
        spark.sql("SELECT missing FROM VALUES (1) AS rows(present)").collect()
    logger = logging.getLogger("SQLQueryContextLogger")
    assert not logger.propagate  # so pytest adds its handlers to it
    handler = logging.StreamHandler()
    handler.setFormatter(formatter := logging.Formatter())
    logger.addHandler(handler)
    logger.removeHandler(handler)
    assert handler.formatter is formatter
