"""The agreements of services, clients and job files: states, records, errors, the base of a job's sections."""
