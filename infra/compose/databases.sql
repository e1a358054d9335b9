-- Run once, by the image of Postgres, when its folder is empty.
CREATE DATABASE airflow;
CREATE DATABASE mlflow;
