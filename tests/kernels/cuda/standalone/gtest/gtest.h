// Stands in for GoogleTest where a machine has none: the part of it that the tests of kernels use,
// and a main() that runs them. Usage: program [part of a name].
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace testing {

// --- what is run
// -------------------------------------------------------------------------------------

struct RegisteredTest {
  std::string name;
  std::function<void()> run;
};
inline std::vector<RegisteredTest>& registered_tests() {
  static std::vector<RegisteredTest> tests;
  return tests;
}
// Suites of tests that take a parameter, until their parameters are known.
template <typename Suite>
std::vector<std::pair<std::string, std::function<void()>>>& tests_of_suite() {
  static std::vector<std::pair<std::string, std::function<void()>>> tests;
  return tests;
}
inline bool add(std::string name, std::function<void()> run) {
  registered_tests().push_back({std::move(name), std::move(run)});
  return true;
}

struct Outcome {
  bool failed = false;
  bool skipped = false;
  std::vector<std::string> traces;
};
inline Outcome& outcome() {
  static Outcome current;
  return current;
}

class Test {
 public:
  virtual ~Test() = default;
};
template <typename T>
struct TestParamInfo {
  T param;
  size_t index;
};
template <typename T>
class TestWithParam : public Test {
 public:
  using ParamType = T;
  static const T& GetParam() { return *current(); }
  static const T*& current() {
    static const T* parameter = nullptr;
    return parameter;
  }
};
template <typename Container>
Container ValuesIn(Container values) {
  return values;
}

// Instantiates every test of `Suite` with every parameter.
template <typename Suite, typename Values, typename Name>
bool instantiate(const char* prefix, const char* suite, Values values, Name name) {
  using Parameter = typename Suite::ParamType;
  for (const auto& [test, run] : tests_of_suite<Suite>()) {
    size_t index = 0;
    for (const Parameter& parameter : values) {
      const std::string full = std::string(prefix) + "/" + suite + "." + test + "/" +
                               name(TestParamInfo<Parameter>{parameter, index++});
      add(full, [parameter, run = run] {
        Suite::current() = &parameter;
        run();
      });
    }
  }
  return true;
}

// --- what is expected
// --------------------------------------------------------------------------------

class Failure {
 public:
  Failure(const char* file, int line, std::string what) {
    text_ << file << ":" << line << ": " << what << " ";
  }
  ~Failure() {
    outcome().failed = true;
    std::printf("%s\n", text_.str().c_str());
    for (const std::string& trace : outcome().traces) std::printf("  in %s\n", trace.c_str());
  }
  Failure(const Failure&) = delete;
  Failure& operator=(const Failure&) = delete;
  template <typename T>
  Failure& operator<<(const T& value) {
    text_ << value;
    return *this;
  }

 private:
  std::ostringstream text_;
};
class Skip {
 public:
  Skip() { outcome().skipped = true; }
  template <typename T>
  Skip& operator<<(const T&) {
    return *this;
  }
};
// For `return Voidify() = Failure(...) << ...`.
struct Voidify {
  void operator=(const Failure&) const {}
  void operator=(const Skip&) const {}
};

template <typename T, typename = void>
struct IsPrintable : std::false_type {};
template <typename T>
struct IsPrintable<T,
                   std::void_t<decltype(std::declval<std::ostream&>() << std::declval<const T&>())>>
    : std::true_type {};
template <typename T>
std::string show(const T& value) {
  std::ostringstream text;
  if constexpr (IsPrintable<T>::value) {
    text << value;
  } else {
    text << "(" << sizeof(T) << " bytes)";
  }
  return text.str();
}

// "x == y, with 1 and 2", or nothing where that holds.
template <typename A, typename B, typename Compare>
std::string unless(const A& a, const B& b, const char* text, Compare compare) {
  return compare(a, b) ? std::string()
                       : std::string(text) + ", with " + show(a) + " and " + show(b);
}

class ScopedTrace {
 public:
  explicit ScopedTrace(const std::string& text) { outcome().traces.push_back(text); }
  ~ScopedTrace() { outcome().traces.pop_back(); }
  ScopedTrace(const ScopedTrace&) = delete;
  ScopedTrace& operator=(const ScopedTrace&) = delete;
};

inline int run_all(const char* part) {
  size_t failed = 0, skipped = 0, run = 0;
  for (const RegisteredTest& test : registered_tests()) {
    if (test.name.find(part) == std::string::npos) continue;
    outcome() = {};
    try {
      test.run();
    } catch (const std::exception& error) {
      outcome().failed = true;
      std::printf("%s\n", error.what());
    }
    ++run;
    skipped += outcome().skipped ? 1 : 0;
    if (!outcome().failed) continue;
    ++failed;
    std::printf("FAILED %s\n", test.name.c_str());
  }
  std::printf("%zu tests, %zu failed, %zu skipped\n", run, failed, skipped);
  return failed == 0 && run != 0 ? 0 : 1;
}

}  // namespace testing

#define GRADFERRY_TEST_CLASS(suite, test) suite##_##test##_Test
#define TEST(suite, test)                                                   \
  static void GRADFERRY_TEST_CLASS(suite, test)();                          \
  static const bool suite##_##test##_added =                                \
      ::testing::add(#suite "." #test, &GRADFERRY_TEST_CLASS(suite, test)); \
  static void GRADFERRY_TEST_CLASS(suite, test)()
#define TEST_P(suite, test)                                         \
  struct GRADFERRY_TEST_CLASS(suite, test) : suite {                \
    void body();                                                    \
  };                                                                \
  static const bool suite##_##test##_added = [] {                   \
    ::testing::tests_of_suite<suite>().emplace_back(                \
        #test, [] { GRADFERRY_TEST_CLASS(suite, test)().body(); }); \
    return true;                                                    \
  }();                                                              \
  void GRADFERRY_TEST_CLASS(suite, test)::body()
#define INSTANTIATE_TEST_SUITE_P(prefix, suite, values, name) \
  static const bool prefix##_##suite##_instantiated =         \
      ::testing::instantiate<suite>(#prefix, #suite, values, name)

#define SCOPED_TRACE(text) const ::testing::ScopedTrace scoped_trace(text)
#define GTEST_SKIP() return ::testing::Voidify() = ::testing::Skip()
#define GRADFERRY_FAILURE(what) ::testing::Failure(__FILE__, __LINE__, what)
#define FAIL() return ::testing::Voidify() = GRADFERRY_FAILURE("failed")
#define GRADFERRY_COMPARE(a, b, operation)          \
  ::testing::unless(a, b, #a " " #operation " " #b, \
                    [](const auto& x, const auto& y) { return x operation y; })
#define GRADFERRY_EXPECT(failure)                         \
  if (const std::string unmet = failure; unmet.empty()) { \
  } else                                                  \
    GRADFERRY_FAILURE(unmet)
#define GRADFERRY_ASSERT(failure)                         \
  if (const std::string unmet = failure; unmet.empty()) { \
  } else                                                  \
    return ::testing::Voidify() = GRADFERRY_FAILURE(unmet)
#define GRADFERRY_HOLDS(condition) ((condition) ? std::string() : std::string(#condition))

#define EXPECT_TRUE(condition) GRADFERRY_EXPECT(GRADFERRY_HOLDS(condition))
#define ASSERT_TRUE(condition) GRADFERRY_ASSERT(GRADFERRY_HOLDS(condition))
#define EXPECT_EQ(a, b) GRADFERRY_EXPECT(GRADFERRY_COMPARE(a, b, ==))
#define EXPECT_NE(a, b) GRADFERRY_EXPECT(GRADFERRY_COMPARE(a, b, !=))
#define EXPECT_GT(a, b) GRADFERRY_EXPECT(GRADFERRY_COMPARE(a, b, >))
#define ASSERT_EQ(a, b) GRADFERRY_ASSERT(GRADFERRY_COMPARE(a, b, ==))
