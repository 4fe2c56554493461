-- the tables of a gallery. SQLite keeps these texts, and a file that has any other is refused: a change is a new format

CREATE TABLE facts (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    title TEXT NOT NULL,
    digest TEXT NOT NULL,
    embedding_size INTEGER NOT NULL,
    image_size INTEGER NOT NULL,
    detector TEXT NOT NULL,
    which TEXT NOT NULL,
    network_path TEXT NOT NULL,
    detector_path TEXT NOT NULL
);

CREATE TABLE people (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE
);

-- columns behind a long one are slow to read, so vectors and faces are last
CREATE TABLE images (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    person INTEGER NOT NULL REFERENCES people (id),
    picture TEXT NOT NULL,
    hash BLOB NOT NULL,
    face INTEGER NOT NULL,
    norm REAL NOT NULL,
    quality REAL NOT NULL,
    added INTEGER NOT NULL,
    vector_sum BLOB NOT NULL,
    vector BLOB NOT NULL,
    UNIQUE (person, hash, face)
);

CREATE TABLE faces (
    image INTEGER PRIMARY KEY REFERENCES images (id),
    face_sum BLOB NOT NULL,
    png BLOB NOT NULL
);
